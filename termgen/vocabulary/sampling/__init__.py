"""What a row of the table of sampling parameters says; the table is `SamplingParams` itself."""
