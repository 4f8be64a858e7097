"""What the state is written as: text, JSON and the files of other tools. Each reads
`tracer.state.view` only."""
