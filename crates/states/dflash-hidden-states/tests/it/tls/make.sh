#!/usr/bin/env bash
# Creates the certificates of the https tests, valid for a hundred years: a private authority (ca.pem), and
# a server at 127.0.0.1 (cert.pem, key.pem). The keys protect nothing.
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 \
  -keyout "$work/ca.key" -out ca.pem -subj "/CN=dflash test authority"
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem \
  -out "$work/server.csr" -subj "/CN=127.0.0.1"
openssl x509 -req -in "$work/server.csr" -CA ca.pem -CAkey "$work/ca.key" -CAcreateserial -CAserial "$work/ca.srl" \
  -days 36500 -out cert.pem -extfile <(printf 'subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n')
