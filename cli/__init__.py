"""The ``holdfast`` command.

==============  ==========================================================================================
``main``        the entry point: takes arguments, returns the exit status, prints errors as one line
``app``         the list of the commands, each a function in one of the modules below; completion
``arguments``   the arguments and options that several commands share
``recipes``     run and recipes
``listing``     ls and watch
``inspect``     show, diff and verify
``change``      prune, rm, rollback, pin and unpin
``convert``     cp, import and export
``supervise``   supervise: the rules for restarts, and the loop
``drill``       drill, a package
``run_report``  report, a package
``program``     another program as a child process: started, watched, ended
``child``       inside of such a program: its heartbeat, and the start of a rehearsal
``report``      the output of the commands: tables for people, JSON for programs
``progress``    the progress of a command
``streams``     printable text, log lines, and closed standard streams
==============  ==========================================================================================
"""
