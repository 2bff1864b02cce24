"""A small loop around a program's steps, for those who want one."""

from weft.program.loop import logs as logs
