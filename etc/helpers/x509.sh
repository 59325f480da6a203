#!/bin/sh
# A helper for networks with certificates: signs what the server asks for, with the feature pki, by openssl 3.
#
# The servers that may come are files in $nodes, named for them, which hold the role of the server; others have to
# wait. The daemon has compared the name in the request with the identity; here the certificate gets this name
# and no other, whatever else the request asks for.
#
# Copy it, and change what follows. The user of the daemon must be able to read the key of the CA, and nobody else.
nodes=/etc/choria-provisioner/nodes
ca=/etc/choria-provisioner/ca.pem
ca_key=/etc/choria-provisioner/ca-key.pem
brokers=broker.example.net:4222
days=365

# ranges of letters mean the same everywhere
LC_ALL=C

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

# gives in $value the text that follows a name in $rest, and in $rest what comes after it
value_of() {
    value=${rest#*"\"$1\":"}
    [ "$value" != "$rest" ] || fail "the input has no $1"
    value=${value#*'"'}
    rest=${value#*'"'}
    value=${value%%'"'*}
}

# gives in $text the lines of standard input as a JSON string has them
as_text() {
    text=
    while IFS= read -r line || [ -n "$line" ]; do
        text=$text$line'\n'
    done
}

# one line, with the identity and then the csr at its beginning; `read` takes it byte by byte, so where servers have
# more than 5 kB of facts this is faster: rest=$(head -c 16384)
IFS= read -r rest || [ -n "$rest" ] || fail "there is no input on standard input"

value_of identity
identity=$value
case $identity in
'' | [.-]* | *[!A-Za-z0-9._-]*) fail "the identity is not one that this helper takes" ;;
esac

if [ ! -e "$nodes/$identity" ]; then
    printf '{"defer": true, "msg": "there is no %s"}\n' "$nodes/$identity"
    exit 0
fi
role=
IFS= read -r role <"$nodes/$identity"
case $role in
'' | *[!a-z0-9_]*) fail "$nodes/$identity: no role is in it" ;;
esac

# "csr": {"csr": "…", …}, or "csr": null without the feature
rest=${rest#*'"csr":'}
case $rest in
*'"csr":'*) value_of csr ;;
*) fail "the input has no csr: it comes with features: pki: true in provisioner.yaml" ;;
esac
csr=$value
value_of ssldir
ssldir=$value
case $ssldir in
'' | [!/]* | *[!A-Za-z0-9._/-]*) fail "the ssldir is not one that this helper takes" ;;
esac

for file in "$ca" "$ca_key"; do
    [ -r "$file" ] || fail "$file: cannot be read"
done
as_text <"$ca"
ca_text=$text
case $ca_text in
*[!A-Za-z0-9+/=\\\ -]*) fail "$ca: something else than PEM is in it, maybe a line end of Windows" ;;
esac
# `openssl x509 -req` would do as well, and take four times as long
certificate=$(
    printf '%b\n' "$csr" | openssl req -x509 -in /dev/stdin -copy_extensions none -config /dev/fd/3 \
        -CA "$ca" -CAkey "$ca_key" -subj "/CN=$identity" -days "$days" -sha256 3<<CONFIG
[req]
distinguished_name = nothing_to_ask_for
x509_extensions = extensions
[nothing_to_ask_for]
[extensions]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature, keyEncipherment
extendedKeyUsage = clientAuth, serverAuth
subjectAltName = DNS:$identity
authorityKeyIdentifier = keyid:always
CONFIG
) || fail "openssl could not sign the request"
as_text <<CERTIFICATE
$certificate
CERTIFICATE

# echo would write the line breaks in the texts as such
printf '{
  "certificate": "%s",
  "ca": "%s",
  "configuration": {
    "plugin.choria.server.provision": "false",
    "plugin.choria.middleware_hosts": "%s",
    "plugin.choria.use_srv": "false",
    "plugin.security.provider": "file",
    "plugin.security.file.certificate": "%s",
    "plugin.security.file.key": "%s",
    "plugin.security.file.ca": "%s",
    "identity": "%s",
    "collectives": "mcollective,%s",
    "loglevel": "info"
  }
}\n' "$text" "$ca_text" "$brokers" "$ssldir/certificate.pem" "$ssldir/private.pem" "$ssldir/ca.pem" \
    "$identity" "$role"
