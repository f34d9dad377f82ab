"""Publishing: publishers, the log's writer and the transfer."""
