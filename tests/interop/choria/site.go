package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"strings"
	"time"

	"github.com/choria-io/tokens"
)

// These and all keys are made for one test and protect nothing.
const (
	provisioningToken = "interop-token"
	brokerPassword    = "interop-password"
	organization      = "choria"
	validity          = 365 * 24 * time.Hour
)

// site writes the files of a network: of its broker, its servers and its provisioner
type site struct {
	folder
	kind   string
	port   int
	term   time.Duration // of the leader of an election; 0: the broker holds none
	issuer string        // public key of the organization, hex
}

func (s *site) write() error {
	steps := map[string][]func() error{
		"insecure": {s.certificates, s.natsServer, s.insecure},
		"x509":     {s.certificates, s.x509},
		"org":      {s.certificates, s.keys, s.org},
	}[s.kind]
	if steps == nil {
		return fmt.Errorf("unknown network %q", s.kind)
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}

	return nil
}

func (s *site) insecure() error {
	return firstError(
		s.provisioningJWT(s.path("pki", "jwt-signer-key.pem"), false, false),
		s.settings("choria.cfg", s.client("provisioner.example.net"), "plugin.security.provider = file"),
		s.settings("provisioner.yaml", s.provisioner(), "choria_insecure: true",
			"jwt_verify_cert: "+s.path("pki", "jwt-signer.pem"), "features: {jwt: true}"),
	)
}

func (s *site) x509() error {
	files := func(name string) string {
		return fmt.Sprintf("plugin.security.provider = file\nplugin.security.file.certificate = %s\nplugin.security.file.key = %s\nplugin.security.file.ca = %s",
			s.path("pki", name+".pem"), s.path("pki", name+"-key.pem"), s.path("pki", "ca.pem"))
	}

	return firstError(
		s.provisioningJWT(s.path("pki", "jwt-signer-key.pem"), true, false),
		s.settings("broker.cfg", s.broker(), files("broker"), "plugin.choria.network.provisioning.signer_cert = "+s.path("pki", "jwt-signer.pem")),
		s.settings("choria.cfg", s.client("provisioner.choria"), files("provisioner")),
		s.settings("standby.cfg", s.client("standby.choria"), files("standby")),
		s.settings("provisioner.yaml", s.provisioner(), "broker_provisioning_password: "+brokerPassword,
			"jwt_verify_cert: "+s.path("pki", "jwt-signer.pem"), "features: {jwt: true, pki: true}"),
	)
}

func (s *site) org() error {
	// one token, so to the network two instances of the provisioner are the same
	provisioner := strings.Join([]string{s.client("provisioner_signer"), "plugin.security.provider = choria",
		"plugin.security.choria.ca = " + s.path("pki", "ca.pem"),
		"plugin.security.choria.token_file = " + s.path("keys", "signer.jwt"), "plugin.security.choria.seed_file = " + s.path("keys", "signer.seed")}, "\n")

	return firstError(
		s.provisioningJWT(s.path("keys", "issuer.seed"), true, true),
		s.settings("broker.cfg", s.broker(), "plugin.security.provider = choria",
			"plugin.security.choria.certificate = "+s.path("pki", "broker.pem"), "plugin.security.choria.key = "+s.path("pki", "broker-key.pem"),
			"plugin.security.choria.token_file = "+s.path("keys", "broker.jwt"), "plugin.security.choria.seed_file = "+s.path("keys", "broker.seed"),
			"plugin.security.issuer.names = "+organization, "plugin.security.issuer."+organization+".public = "+s.issuer),
		s.settings("choria.cfg", provisioner),
		s.settings("standby.cfg", provisioner),
		s.settings("provisioner.yaml", s.provisioner(), "broker_provisioning_password: "+brokerPassword, fmt.Sprintf("jwt_verify_cert: %q", s.issuer),
			"jwt_signing_key: "+s.path("keys", "signer.seed"), "jwt_signing_token: "+s.path("keys", "signer.jwt"), "features: {jwt: true, ed25519: true}"),
	)
}

func (s *site) url() string { return fmt.Sprintf("nats://localhost:%d", s.port) }

// broker is what all Choria brokers have in their configuration
func (s *site) broker() string {
	settings := fmt.Sprintf(`identity = broker.example.net
loglevel = info
logfile = /dev/stdout
plugin.choria.use_srv = false
plugin.choria.middleware_hosts = localhost:%[1]d
plugin.choria.broker_network = true
plugin.choria.stats_port = 0
plugin.choria.network.listen_address = 127.0.0.1
plugin.choria.network.client_port = %[1]d
plugin.choria.network.peer_port = 0
plugin.choria.network.system.user = system
plugin.choria.network.system.password = system
plugin.choria.network.provisioning.client_password = %[2]s`, s.port, brokerPassword)
	if s.term == 0 {
		return settings
	}
	settings += fmt.Sprintf("\nplugin.choria.network.stream.store = %s\nplugin.choria.network.stream.leader_election_ttl = %s", s.path("streams"), s.term)
	// the broker makes its streams at once if it has not to find out first in how many copies
	for _, stream := range []string{"event", "machine", "advisory", "executor", "leader_election"} {
		settings += fmt.Sprintf("\nplugin.choria.network.stream.%s_replicas = 1", stream)
	}

	return settings
}

// client is what all provisioners have in choria.cfg, and provisioner what they have in provisioner.yaml
func (s *site) client(identity string) string {
	return fmt.Sprintf("identity = %s\nplugin.choria.use_srv = false\nplugin.choria.middleware_hosts = %s", identity, s.url())
}

func (s *site) provisioner() string {
	return "site: interop\nworkers: 4\ntoken: " + provisioningToken
}

func (s *site) natsServer() error {
	return s.settings("nats.cfg", fmt.Sprintf("listen: \"127.0.0.1:%d\"", s.port), "allow_non_tls: true",
		fmt.Sprintf("tls: {cert_file: %q, key_file: %q}", s.path("pki", "broker.pem"), s.path("pki", "broker-key.pem")))
}

// certificates makes a CA, a pair each for the broker and for two provisioners, and the RSA pair that signs provisioning.jwt
func (s *site) certificates() error {
	caKey, err := s.rsaKey("ca")
	if err != nil {
		return err
	}
	ca, err := s.certificate("ca", caKey, nil, caKey)
	if err != nil {
		return err
	}
	for _, name := range []string{"broker", "provisioner", "standby"} {
		key, err := s.rsaKey(name)
		if err != nil {
			return err
		}
		if _, err = s.certificate(name, key, ca, caKey); err != nil {
			return err
		}
	}

	signer, err := s.rsaKey("jwt-signer")
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(signer.Public())
	if err != nil {
		return err
	}

	return s.pem("jwt-signer", "PUBLIC KEY", public)
}

// certificate makes one that is good for servers and clients alike; without a parent it is that of a CA
func (s *site) certificate(name string, key *rsa.PrivateKey, parent *x509.Certificate, parentKey *rsa.PrivateKey) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: name + ".choria"}, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(validity)}
	if parent == nil {
		parent = template
		template.IsCA, template.KeyUsage = true, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	} else {
		template.KeyUsage = x509.KeyUsageDigitalSignature
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
		template.DNSNames = []string{name + ".choria", "localhost"}
		template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
	if err != nil {
		return nil, err
	}
	if err = s.pem(name, "CERTIFICATE", der); err != nil {
		return nil, err
	}

	return x509.ParseCertificate(der)
}

func (s *site) rsaKey(name string) (*rsa.PrivateKey, error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}

	return key, s.pem(name+"-key", "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key))
}

func (s *site) pem(name, label string, der []byte) error {
	return s.save("pki/"+name+".pem", pem.EncodeToMemory(&pem.Block{Type: label, Bytes: der}))
}

// keys makes the issuer of the organization, and what it issued to the broker and to the provisioner: a chain issuer,
// which may issue the tokens of servers
func (s *site) keys() error {
	issuer, err := s.ed25519Key("issuer")
	if err != nil {
		return err
	}
	s.issuer = hex.EncodeToString(issuer.Public().(ed25519.PublicKey))
	if err = s.save("keys/issuer.public", []byte(s.issuer)); err != nil {
		return err
	}

	key, err := s.ed25519Key("broker")
	if err != nil {
		return err
	}
	broker, err := tokens.NewServerClaims("broker.example.net", []string{"choria"}, organization, nil, nil, key.Public().(ed25519.PublicKey), "", validity)
	if err != nil {
		return err
	}

	if key, err = s.ed25519Key("signer"); err != nil {
		return err
	}
	signer, err := tokens.NewClientIDClaims("provisioner_signer", nil, organization, nil, "", "", validity,
		&tokens.ClientPermissions{ServerProvisioner: true, ElectionUser: true}, key.Public().(ed25519.PublicKey))
	if err != nil {
		return err
	}
	if err = signer.AddOrgIssuerData(issuer); err != nil {
		return err
	}

	return firstError(
		tokens.SaveAndSignTokenWithKeyFile(broker, s.path("keys", "issuer.seed"), s.path("keys", "broker.jwt"), 0o600),
		tokens.SaveAndSignTokenWithKeyFile(signer, s.path("keys", "issuer.seed"), s.path("keys", "signer.jwt"), 0o600),
	)
}

func (s *site) ed25519Key(name string) (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}

	return key, s.save("keys/"+name+".seed", []byte(hex.EncodeToString(key.Seed())))
}

// provisioningJWT makes the token that every server has from the start
func (s *site) provisioningJWT(signer string, secure, v2 bool) error {
	claims, err := tokens.NewProvisioningClaims(secure, true, provisioningToken, "", "", []string{s.url()}, "", "", "", organization, "", validity)
	if err != nil {
		return err
	}
	claims.ProtoV2 = v2

	return tokens.SaveAndSignTokenWithKeyFile(claims, signer, s.path("provisioning.jwt"), 0o600)
}

func (s *site) settings(name string, lines ...string) error {
	return s.save(name, []byte(strings.Join(lines, "\n")+"\n"))
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}

	return nil
}
