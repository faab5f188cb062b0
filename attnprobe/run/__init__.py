"""Run cases in child processes and lose neither a verdict nor a process."""
