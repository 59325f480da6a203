#!/bin/sh
# A sample helper: reads what is known of a server, prints what is to become of it.
#
#     sample_helper.sh DIRECTORY [ISSUER]
#
# A server whose facts say that its approval is pending is deferred, once; DIRECTORY holds a file for each that was.
# With the public key of an organization's issuer the server is configured for that organization's network.
# It uses nothing but the shell itself, since starting programs is what takes a helper's time.

notes=$1
issuer=$2

fail() {
    echo "$1" >&2
    exit 1
}

# gives in $value the text that follows a key, whose quotes are written as $2, in the document
value_of() {
    rest=${document#*"$1:"}
    [ "$rest" != "$document" ] || fail "there is no $1 in the document"
    rest=${rest#*"$2"}
    value=${rest%%"$2"*}
}

IFS= read -r document
[ -n "$document" ] || fail "there is no document on standard input"

value_of '"identity"' '"'
identity=$value
case $identity in
'' | *[!A-Za-z0-9._-]*) fail "the identity is not one that this helper takes" ;;
esac

# the inventory is a text that holds JSON, so its quotes are escaped
value_of '\"role\"' '\"'
role=$value
case $role in
'' | *[!a-z]*) fail "the role is not one that this helper takes" ;;
esac

value_of '\"approval\"' '\"'
if [ "$value" = pending ] && [ ! -e "$notes/$identity" ]; then
    : >"$notes/$identity"
    echo '{"defer": true, "msg": "its approval is pending"}'
    exit 0
fi

security=
claims=
if [ -n "$issuer" ]; then
    # where the server has put its seed, and will put its token
    value_of '"directory"' '"'
    case $value in
    '' | *[!A-Za-z0-9._/-]*) fail "the directory is not one that this helper takes" ;;
    esac
    security='
    "plugin.security.provider": "choria",
    "plugin.security.issuer.names": "choria",
    "plugin.security.issuer.choria.public": "'$issuer'",
    "plugin.security.choria.token_file": "'$value'/server.jwt",
    "plugin.security.choria.seed_file": "'$value'/server.seed",'
    claims='
  "server_claims": {"permissions": {"submission": true, "streams": true}},'
fi

echo "{$claims
  \"configuration\": {
    \"plugin.choria.server.provision\": \"false\",
    \"plugin.choria.middleware_hosts\": \"broker.example.net:4222\",
    \"plugin.choria.use_srv\": \"false\",$security
    \"identity\": \"$identity\",
    \"collectives\": \"choria,$role\",
    \"loglevel\": \"info\"
  }
}"
