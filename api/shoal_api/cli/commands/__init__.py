"""The commands, a file for each subject. Their bodies import what they need, so that the others start fast."""
