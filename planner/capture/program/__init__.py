"""Passes as FX graphs: calls and schedules, written as modules that run them.

``program`` holds the calls of a step as data, ``builder`` builds one pass of calls, ``writer`` writes the steps of a schedule
into it, and ``code`` generates its Python. ``GraphModule.code`` is what people read, and what tracebacks show.
"""
