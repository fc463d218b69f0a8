"""Passes as FX graphs: calls and schedules, written as modules that run them.

``program`` holds the calls of a step as data, ``builder`` makes one pass of calls, ``writer`` writes the steps of a schedule into
it, ``code`` says how it reads as Python. ``GraphModule.code`` is what people read, and what tracebacks show.
"""
