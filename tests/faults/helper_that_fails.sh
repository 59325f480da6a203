#!/bin/sh
# A helper that fails in the way that the first part of its host's identity names, in the first run for a host only.
#
# usage: helper_that_fails.sh DIRECTORY     in which it notes whom it has failed already

# all but a first part of the input stays unread, unless something below reads it
start=$(dd bs=200 count=1 2>/dev/null)
identity=${start#*'"identity": "'}
identity=${identity%%'"'*}

answer() {
  echo '{"configuration":{"plugin.choria.server.provision":"0"}}'
}

works() {
  cat >/dev/null
  answer
  exit 0
}

[ -e "$1/$identity" ] && works
: >"$1/$identity"

case ${identity%%.*} in
hangs) exec sleep 3600 ;;
hangs-after-its-answer)
  answer
  exec sleep 3600
  ;;
hangs-with-its-output-closed) exec sleep 3600 >/dev/null 2>&1 ;;
hangs-with-20-children)
  for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 3600 & done
  wait
  ;;
ignores-sigterm)
  trap '' HUP INT QUIT TERM
  while :; do sleep 1; done
  ;;
stops-itself) kill -STOP $$ ;;

leaves-a-child) sleep 3600 & ;;
leaves-a-child-that-chatters) while sleep 0.01; do echo chatter >&2; done & ;;
leaves-a-child-in-another-session) setsid sleep 3600 & ;;
forks-100-children)
  n=0
  while [ $((n += 1)) -le 100 ]; do sleep 0.1 & done
  ;;

floods-its-output) head -c 100000000 /dev/zero ;;
floods-its-errors) head -c 100000000 /dev/zero >&2 ;;

crashes) kill -SEGV $$ ;;
kills-its-group)
  answer
  kill -KILL 0
  ;;
exits-1)
  answer
  exit 1
  ;;

never-reads)
  answer
  exit 0
  ;;
closes-its-input)
  exec <&-
  answer
  exit 0
  ;;

prints-nothing) exit 0 ;;
prints-bytes)
  printf '\377\376\000'
  exit 0
  ;;
prints-half)
  printf '{"configuration":{"plugin.choria.server.prov'
  exit 0
  ;;
prints-two)
  answer
  answer
  exit 0
  ;;
prints-no-strings)
  echo '{"configuration":{"plugin.choria.server.provision":0}}'
  exit 0
  ;;
prints-brackets)
  head -c 100000 /dev/zero | tr '\0' '['
  exit 0
  ;;
esac
works
