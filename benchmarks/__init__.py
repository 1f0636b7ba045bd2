"""What to measure (problems), how (measure), the run (run) and the tables (report)."""
