"""What clients may call, as tables and pure functions: routes, prompts, usage, stored responses, `/generate`."""
