"""The ``holdfast`` command.

==============  ==========================================================================================
``main``        entry point: parses arguments, prints errors on one line, returns the exit status
``app``         command list and shell completion; the modules below define the commands
``arguments``   arguments and options shared by several commands
``recipes``     the commands ``run`` and ``recipes``
``listing``     the commands ``ls`` and ``watch``
``inspect``     the commands ``show``, ``diff`` and ``verify``
``change``      the commands ``prune``, ``rm``, ``rollback``, ``pin`` and ``unpin``
``convert``     the commands ``cp``, ``import`` and ``export``
``supervise``   the command ``supervise``: the restart policy and the supervision loop
``drill``       the command ``drill`` (a package)
``run_report``  the command ``report`` (a package)
``program``     starts, watches and ends another program as a child process
``child``       runs inside the child process: reports its heartbeat and starts rehearsals
``report``      command output: tables for people, JSON for programs
``progress``    progress display
``streams``     printable text, log lines, and closed standard streams
==============  ==========================================================================================
"""
