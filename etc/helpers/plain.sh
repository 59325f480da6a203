#!/bin/sh
# A helper for servers that have their certificates already: they get their configuration, and nothing else.
#
# The servers that may come are files in $nodes, named for them, which hold the role of the server; others have to
# wait. No other program is started, for that is what takes a helper's time.
#
# Copy it, and change what follows.
nodes=/etc/choria-provisioner/nodes
brokers=broker.example.net:4222

# ranges of letters mean the same everywhere
LC_ALL=C

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

# gives in $value the text that follows a name in the input
value_of() {
    value=${input#*"\"$1\":"}
    [ "$value" != "$input" ] || fail "the input has no $1"
    value=${value#*'"'}
    value=${value%%'"'*}
}

# one line, with the identity at its beginning; `read` takes it byte by byte, so where servers have more than 5 kB of
# facts this is faster: input=$(head -c 1024)
IFS= read -r input || [ -n "$input" ] || fail "there is no input on standard input"

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

printf '{"configuration": {
  "plugin.choria.server.provision": "false",
  "plugin.choria.middleware_hosts": "%s",
  "plugin.choria.use_srv": "false",
  "identity": "%s",
  "collectives": "mcollective,%s",
  "loglevel": "info"
}}\n' "$brokers" "$identity" "$role"
