"""The search for the fastest strategy of a step on a machine, with a bound for all others."""

from weft.search.budget import Auto as Auto
from weft.search.record import SearchRecord as SearchRecord
from weft.search.result import SearchResult as SearchResult
from weft.search.result import Tried as Tried
from weft.search.search import search as search
