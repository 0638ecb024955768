"""``holdfast drill``: the command, and the observer inside of the program that it rehearses.

=================  ==============================================================================
``command``        the runs, undisturbed and interrupted, and their comparison
``interruptions``  which preemptions are rehearsed
``findings``       the results: differences, their causes in words, the report
``plan``           instructions for a start of the program: the interface between command and program
``rehearsal``      the observer inside of the program, which interrupts it and reports; stand-ins for its directories
=================  ==============================================================================
"""
