"""What is measured (problems), how (measure), the run (run) and what is written of it (report)."""
