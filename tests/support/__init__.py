"""What tests share: a slow model of every average, tables of cases, and tools to run things."""
