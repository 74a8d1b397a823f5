"""An engine, a server and a prover, to try kvarve and to prove it: not the product."""
