package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/choria-io/go-choria/broker/network"
	"github.com/choria-io/go-choria/build"
	"github.com/choria-io/go-choria/choria"
	"github.com/choria-io/go-choria/config"
	"github.com/choria-io/go-choria/plugin"
	agents "github.com/choria-io/go-choria/providers/agent/mcorpc/golang"
	"github.com/choria-io/go-choria/providers/agent/mcorpc/golang/provision"
	"github.com/choria-io/go-choria/providers/provtarget"
	"github.com/choria-io/go-choria/server"
	natsd "github.com/nats-io/nats-server/v2/server"
	"github.com/sirupsen/logrus"
)

// runBroker runs a Choria broker where the network has a configuration for one, else a NATS server
func runBroker(ctx context.Context, f folder) error {
	if _, err := os.Stat(f.path("broker.cfg")); errors.Is(err, os.ErrNotExist) {
		return runNATSServer(ctx, f)
	}
	cfg, err := config.NewSystemConfig(f.path("broker.cfg"), true)
	if err != nil {
		return err
	}
	bi := &build.Info{}
	cfg.ApplyBuildSettings(bi)
	fw, err := choria.NewWithConfig(cfg)
	if err != nil {
		return err
	}
	broker, err := network.NewServer(fw, bi, false)
	if err != nil {
		return err
	}

	wg := &sync.WaitGroup{}
	wg.Add(1)
	broker.Start(ctx, wg) // returns when the context ends

	return nil
}

// runNATSServer offers TLS, on which real servers insist, and does not require it. Choria's own broker cannot do that.
func runNATSServer(ctx context.Context, f folder) error {
	opts, err := natsd.ProcessConfigFile(f.path("nats.cfg"))
	if err != nil {
		return err
	}
	opts.NoSigs = true
	broker, err := natsd.NewServer(opts)
	if err != nil {
		return err
	}
	broker.ConfigureLogger()
	go broker.Start()
	<-ctx.Done()
	broker.Shutdown()
	broker.WaitForShutdown()

	return nil
}

// runServer runs a server. While its configuration file is missing it is in provisioning mode, and its audit log tells
// who asked what of it. After that the restart action of its provisioning agent executes this same command line anew, in
// the same process.
func runServer(ctx context.Context, f folder, identity string) error {
	agent := map[string]plugin.Pluggable{"golangmco": agents.ChoriaPlugin(), "choria_provision": provision.ChoriaPlugin()}
	for name, part := range agent {
		if err := plugin.Register(name, part); err != nil {
			return err
		}
	}
	build.ProvisionJWTFile = f.path("provisioning.jwt")

	if err := os.MkdirAll(f.path("servers", identity), 0o755); err != nil {
		return err
	}
	cfg, err := serverConfig(ctx, f.path("servers", identity, "server.conf"), identity)
	if err != nil {
		return err
	}
	cfg.ApplyBuildSettings(&build.Info{})
	cfg.LogLevel = "info"
	fw, err := choria.NewWithConfig(cfg)
	if err != nil {
		return err
	}
	fw.ConfigureProvisioning(ctx)
	instance, err := server.NewInstance(fw)
	if err != nil {
		return err
	}

	wg := &sync.WaitGroup{}
	wg.Add(1)
	if err = instance.Run(ctx, wg); err != nil { // returns once it is connected and listens
		return err
	}
	event(map[string]any{"event": "connected", "identity": cfg.Identity, "collectives": cfg.Collectives, "waiting": fw.ProvisionMode()})
	<-ctx.Done()

	return nil
}

func serverConfig(ctx context.Context, file, identity string) (*config.Config, error) {
	if _, err := os.Stat(file); err == nil {
		cfg, err := config.NewSystemConfig(file, true)
		if err == nil {
			provtarget.Configure(ctx, cfg, logrus.WithField("component", "provtarget"))
		}
		return cfg, err
	}

	cfg, err := config.NewDefaultSystemConfig(true)
	if err != nil {
		return nil, err
	}
	// fills in what a new configuration takes from provisioning.jwt, hence made twice
	provtarget.Configure(ctx, cfg, logrus.WithField("component", "provtarget"))
	if cfg, err = config.NewDefaultSystemConfig(true); err != nil {
		return nil, err
	}
	cfg.ConfigFile = file
	cfg.RPCAudit, cfg.Choria.RPCAuditLogfile = true, filepath.Join(filepath.Dir(file), "audit.log")
	cfg.Choria.SecurityProvider = "file"
	cfg.DisableSecurityProviderVerify = true
	cfg.Identity, cfg.OverrideCertname = identity, identity

	return cfg, nil
}

// event tells the tests, one line of JSON on standard output
func event(fields map[string]any) {
	fields["time"] = time.Now().UTC().Format(time.RFC3339Nano)
	line, _ := json.Marshal(fields)
	fmt.Println(string(line))
}
