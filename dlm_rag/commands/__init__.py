"""The programs: what a command line says, the job it asks for."""
