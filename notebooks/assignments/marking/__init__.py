"""Hands out the assignments and marks what comes back; `README.md` one folder up is for teachers.

Each module uses only those above it:

    assignment   what an assignment is: its text, exercises, tests and points
    channel      messages between the judge and a solution: values, and nothing that can run
    solution     the student's side of it, in a process of its own, or in one for each rank
    backend      torch.distributed there: the judge carries its messages
    process      starts that process behind walls, limits it, ends it and all that it started
    cases        what a test asks for, and the one comparison that decides
    exchange     messages between a solution's ranks, carried and recorded by the judge
    calls        a call of a test as a student can type it
    harmless     text of students made safe to print, to store and to show
    notebook     a student's notebook: which of its cells are whose
    judge        runs an exercise's tests on a solution; a process for each submission
    files        finds what was handed in, and reads it, packed or not
    gradebook    nbgrader's folders and database, and the pages of feedback
    grade        marks a folder of submissions

    python -m marking release [FOLDER]
    python -m marking grade SUBMISSIONS [OUT]
"""
