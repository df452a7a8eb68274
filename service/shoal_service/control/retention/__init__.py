"""Carries out deletions: files in the storage first, then rows.

Called by the HTTP edge, and by the control plane that holds the lease. It never decides what is old enough: that is
`core/retention/`.
"""
