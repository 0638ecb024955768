"""``holdfast drill``: the command, and the observer inside the rehearsed program.

=================  ==============================================================================
``command``        the undisturbed and the interrupted runs, and their comparison
``interruptions``  which preemptions are rehearsed
``findings``       the results: differences, explanations of their causes, the report
``plan``           instructions for one start of the program: the interface between command and program
``rehearsal``      the observer inside the program, which interrupts it and reports; directory redirection
=================  ==============================================================================
"""
