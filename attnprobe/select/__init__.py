"""The selector: from a compiled matrix and a configuration to a decision with reasons.

Reads matrices; imports nothing that plans, runs or judges, and no torch.
"""
