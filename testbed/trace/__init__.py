"""Spans in; metrics, tables, Perfetto file and Gantt chart out."""
