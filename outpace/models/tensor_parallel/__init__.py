"""One model on several processes: each has a part of every layer, and the first one leads the others."""
