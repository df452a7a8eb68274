"""Commands that keep a service in order: delete, collect what is old, back up, restore."""
