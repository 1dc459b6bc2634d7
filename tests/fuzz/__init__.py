"""Fuzzing: every entrance of kvferry as a function of bytes (case h1).

`targets` has the functions, `python -m tests.fuzz` runs them under atheris, and
`test_targets` runs them with every test run, for seconds.
"""
