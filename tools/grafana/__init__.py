"""What the dashboards of Grafana show: panels and their queries, as data.

`tools/dashboards.py` makes the files of it. Nothing here knows the format of Grafana.
"""
