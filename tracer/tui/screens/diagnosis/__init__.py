"""The Diagnosis screen and its widgets."""
