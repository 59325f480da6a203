// Command choria runs the real parts of a Choria network, for tests of the provisioner against them. Everything
// about one network is in one folder.
//
//	choria make      --dir DIR --network KIND --port PORT   write keys, tokens and all configuration files
//	choria broker    --dir DIR                              run the broker
//	choria server    --dir DIR --identity NAME              run a server, which waits to be provisioned
//	choria candidate --dir DIR                              campaign in the provisioners' election
//	choria evict     --dir DIR                              evict the leader of that election
//
// A part ends on SIGTERM and when its standard input is closed, so that none outlives the test that started it.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "choria:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("wanted make, broker, server, candidate or evict")
	}
	flags := flag.NewFlagSet(args[0], flag.ExitOnError)
	dir := flags.String("dir", "", "folder of the network")
	kind := flags.String("network", "", "make: insecure, x509 or org")
	port := flags.Int("port", 0, "make: port of the broker, on 127.0.0.1")
	term := flags.Duration("election-ttl", 0, "make: have the broker hold elections, whose leaders are forgotten after that time")
	identity := flags.String("identity", "", "server: what it is called until it is provisioned")
	flags.Parse(args[1:])
	path, err := filepath.Abs(*dir)
	if err != nil {
		return err
	}

	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	switch args[0] {
	case "make":
		return (&site{folder: folder(path), kind: *kind, port: *port, term: *term}).write()
	case "broker":
		go endWithInput(cancel)
		return runBroker(ctx, folder(path))
	case "server":
		go endWithInput(cancel)
		return runServer(ctx, folder(path), *identity)
	case "candidate":
		go endWithInput(cancel)
		return runCandidate(ctx, folder(path))
	case "evict":
		return evictLeader(ctx, folder(path))
	default:
		return fmt.Errorf("unknown command %q", args[0])
	}
}

func endWithInput(cancel context.CancelFunc) {
	io.Copy(io.Discard, os.Stdin)
	cancel()
}

// folder is where everything about one network is
type folder string

func (f folder) path(parts ...string) string {
	return filepath.Join(append([]string{string(f)}, parts...)...)
}

func (f folder) save(name string, content []byte) error {
	file := f.path(name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}

	return os.WriteFile(file, content, 0o600)
}
