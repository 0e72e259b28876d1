"""From a failed run's output to words: who failed first, the likely cause, and the fix. Pure: text in, text out."""
