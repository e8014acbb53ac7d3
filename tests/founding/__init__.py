"""Each row of docs/founding.md that can be asked over HTTP, asked of one running fleet of sims."""
