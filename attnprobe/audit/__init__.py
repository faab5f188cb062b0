"""Where the installed libraries' own selectors disagree with what was measured: one file a selector."""
