"""The ``holdfast`` command.

==============  ==========================================================================================
``main``        the entry point: parses arguments, returns the exit status, prints errors as one line
``app``         the list of commands, each a function in one of the modules below; shell completion
``arguments``   arguments and options shared by several commands
``recipes``     run and recipes
``listing``     ls and watch
``inspect``     show, diff and verify
``change``      prune, rm, rollback, pin and unpin
``convert``     cp, import and export
``supervise``   supervise: the restart policy, and the supervision loop
``drill``       drill, a package
``run_report``  report, a package
``program``     runs another program as a child process: starts, watches and ends it
``child``       the code inside such a program: its heartbeat, and the start of a rehearsal
``report``      output of the commands: tables for people, JSON for programs
``progress``    progress display
``streams``     printable text, log lines, and closed standard streams
==============  ==========================================================================================
"""
