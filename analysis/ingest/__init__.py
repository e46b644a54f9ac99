"""Import of profiler traces, of jobs that `gsreal` did not run, as measured Results."""
