"""The copy thread of restores, in C: it never takes the interpreter's lock from the thread that serves."""
