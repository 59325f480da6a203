#!/bin/sh
# The helper of the soak: does what the facts of a server ask for. It uses nothing but the shell itself, since starting
# programs is what takes a helper's time.
#
#     helper.sh DIRECTORY      holds a file for each server that got its difficulty already, and one while all fails

notes=$1
IFS= read -r document

[ ! -e "$notes/outage" ] || exit 3

value_of() {
    rest=${document#*"$1"}
    value=${rest%%"$2"*}
}

value_of '"identity": "' '"'
identity=$value
value_of '\"helper\":\"' '\"'
asked=$value

if [ "$asked" != leave ] && [ "$asked" != work ] && [ "$asked" != upgrade ] && [ ! -e "$notes/$identity" ]; then
    : >"$notes/$identity"
    case $asked in
    defer) echo '{"defer": true, "msg": "not yet"}' && exit ;;
    crash) kill -SEGV $$ ;;
    flood) while :; do echo "$document"; done ;;
    hang) exec sleep 60 ;;
    esac
fi

upgrade=
case $asked in
leave) sleep 20 & ;;
upgrade) upgrade='"upgrade": "0.31.0",' ;;
esac

echo "{$upgrade \"configuration\": {
    \"identity\": \"$identity\",
    \"plugin.choria.server.provision\": \"false\",
    \"plugin.choria.middleware_hosts\": \"broker.example.net:4222\"
}}"
