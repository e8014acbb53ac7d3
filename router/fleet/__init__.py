"""What the router knows of workers: who they are, what each reports, which adapters it may serve, whether it answers.

May import `http`, `core` and the other services' `wire`.
"""
