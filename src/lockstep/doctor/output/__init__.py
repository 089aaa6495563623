"""Findings and verdicts for people: terminal tables and HTML pages."""
