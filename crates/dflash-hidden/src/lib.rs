//! Hidden-state records, the wire protocol, its client and the sources a trainer can read.
