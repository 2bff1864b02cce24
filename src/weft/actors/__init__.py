"""Actors, registers and credits: when may which actor act. Pure state machines; who drives them owns time and work."""

from weft.actors.deadlock import root_cause as root_cause
from weft.actors.machine import QueueMachine as QueueMachine
from weft.actors.messages import Act as Act
from weft.actors.messages import Action as Action
from weft.actors.messages import Begin as Begin
from weft.actors.messages import EndStep as EndStep
from weft.actors.messages import Event as Event
from weft.actors.messages import Finished as Finished
from weft.actors.messages import Free as Free
from weft.actors.messages import QueueStatistics as QueueStatistics
from weft.actors.messages import Ready as Ready
from weft.actors.messages import Released as Released
from weft.actors.messages import Send as Send
from weft.actors.messages import Waiting as Waiting
from weft.actors.messages import actor_text as actor_text
from weft.actors.messages import waiting_text as waiting_text
from weft.actors.messages import when_text as when_text
from weft.actors.rank_driver import Clock as Clock
from weft.actors.rank_driver import Driver as Driver
from weft.actors.rank_driver import Executor as Executor
from weft.actors.rank_driver import Post as Post
from weft.actors.rank_driver import RankDriver as RankDriver
from weft.actors.rank_driver import machines as machines
