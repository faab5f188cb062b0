"""From facts to verdicts: plan, inputs, reference, judge, localise. Nothing here starts a process."""
