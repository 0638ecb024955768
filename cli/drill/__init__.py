"""``holdfast drill``: the command, and the observer that runs inside the rehearsed program.

=================  =====================================================================================
``command``        runs the program with and without interruptions, and compares its checkpoints
``interruptions``  chooses the preemptions to rehearse
``findings``       explains the differences between checkpoints, and prints the report
``plan``           defines the instructions that the command passes to the program in each attempt
``rehearsal``      interrupts the program from inside, records its events, and redirects its directories
=================  =====================================================================================
"""
