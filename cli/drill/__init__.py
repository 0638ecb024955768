"""``holdfast drill``: the command, and what runs inside of the program that it rehearses.

=================  ==============================================================================
``command``        the runs: an undisturbed one, an interrupted one, and what is compared
``interruptions``  which preemptions are rehearsed
``findings``       what was found: differences, their causes in words, the report
``plan``           what a start of the program must do: the interface between command and program
``rehearsal``      inside of the program: the observer that interrupts it and reports; folders for its directories
=================  ==============================================================================
"""
