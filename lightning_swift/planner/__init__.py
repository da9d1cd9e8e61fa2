"""Does it fit, how fast is it, which strategy: functions on sizes, without Lightning and, but for the trace, torch."""
