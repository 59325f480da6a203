package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/choria-io/go-choria/backoff"
	"github.com/choria-io/go-choria/choria"
	"github.com/choria-io/go-choria/config"
	"github.com/choria-io/go-choria/inter"
	election "github.com/choria-io/go-choria/providers/election/streams"
)

const (
	electionName = "provisioner"
	bucketWait   = time.Minute // the broker makes the bucket after its start
)

// runCandidate campaigns as the Go original of the provisioner does, and does nothing else
func runCandidate(ctx context.Context, f folder) error {
	cfg, err := clientConfig(f)
	if err != nil {
		return err
	}
	cfg.Choria.NatsUser, cfg.Choria.NatsPass = "provisioner", brokerPassword
	fw, conn, err := connect(ctx, cfg)
	if err != nil {
		return err
	}

	say := func(what string) func() {
		return func() { event(map[string]any{"event": what, "identity": cfg.Identity}) }
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var candidate inter.Election
	for end := time.Now().Add(bucketWait); ; time.Sleep(100 * time.Millisecond) {
		candidate, err = fw.NewElection(ctx, conn, electionName, true,
			election.OnWon(say("won")), election.OnLost(say("lost")), election.WithBackoff(backoff.TwentySec))
		if err == nil {
			break
		}
		if ctx.Err() != nil || time.Now().After(end) {
			return err
		}
	}
	say("campaigning")()

	if err = candidate.Start(ctx); errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// evictLeader does what `choria election evict` does: outside of the provisioning account it marks the key as deleted
func evictLeader(ctx context.Context, f folder) error {
	cfg, err := clientConfig(f)
	if err != nil {
		return err
	}
	_, conn, err := connect(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close()
	streams, err := conn.Nats().JetStream()
	if err != nil {
		return err
	}
	bucket, err := streams.KeyValue("CHORIA_LEADER_ELECTION")
	if err != nil {
		return fmt.Errorf("opening the bucket: %w", err)
	}

	return bucket.Delete(electionName)
}

func clientConfig(f folder) (*config.Config, error) {
	if os.Getenv("USER") == "" {
		os.Setenv("USER", "interop") // go-choria wants to know who runs a client
	}
	cfg, err := config.NewConfig(f.path("choria.cfg"))
	if err != nil {
		return nil, err
	}
	cfg.Collectives, cfg.MainCollective = []string{"provisioning"}, "provisioning"
	cfg.LogLevel, cfg.LogFile = "warn", "stderr"

	return cfg, nil
}

func connect(ctx context.Context, cfg *config.Config) (*choria.Framework, inter.Connector, error) {
	fw, err := choria.NewWithConfig(cfg)
	if err != nil {
		return nil, nil, err
	}
	conn, err := fw.NewConnector(ctx, fw.MiddlewareServers, fw.Certname(), fw.Logger("election"))

	return fw, conn, err
}
