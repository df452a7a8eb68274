"""Routes that delete jobs and what ended jobs leave behind."""
