"""The ``holdfast`` command.

===========  =====================================================================
``main``     the entry point: arguments in, exit status out, errors as one line
``status``   the exit statuses
``app``      the commands and their arguments
``places``   what a directory argument means: a run, a manager's directory, a step
``report``   what the commands print: tables for people, JSON for programs
``log``      where log lines go
===========  =====================================================================
"""
