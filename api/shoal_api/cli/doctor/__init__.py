"""`shoal doctor`: looks at this machine and at the server, and says what will not work, and why, before a job does."""
