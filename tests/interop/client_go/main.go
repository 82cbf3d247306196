// Command client_go drives a cluster with client-go, the Go client of the TiKV project: RawKV, or transactions.
//
//	client_go PD_ADDRESS v1|v2
//	client_go PD_ADDRESS txn [KEYSPACE]
//
// It reads one request a line from standard input and answers each with one line, both JSON, bytes in base64:
//
//	{"op": "put", "key": "a2V5", "value": "dmFsdWU=", "ttl": 0}   ->   {}
//	{"op": "get", "key": "a2V5"}                                  ->   {"value": "dmFsdWU="}   (null: no such key)
//
// A request that fails is answered by {"error": "..."}. It ends with its input.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/pingcap/kvproto/pkg/kvrpcpb"
	"github.com/pingcap/log"
	"github.com/tikv/client-go/v2/rawkv"
	"go.uber.org/zap"
)

// request holds the arguments of all operations; each takes those it needs.
type request struct {
	Op       string   `json:"op"`
	Key      []byte   `json:"key"`
	Value    []byte   `json:"value"`
	Previous []byte   `json:"previous"` // of cas: null where no key is expected
	TTL      uint64   `json:"ttl"`      // seconds, 0 for ever
	Start    []byte   `json:"start"`    // of scans: of a reverse one the upper, exclusive end
	End      []byte   `json:"end"`
	Limit    int      `json:"limit"`
	KeysOnly bool     `json:"keys_only"`
	Keys     [][]byte `json:"keys"`
	Values   [][]byte `json:"values"`
	TTLs     []uint64 `json:"ttls"`
}

type answer map[string]any

func main() {
	if len(os.Args) < 3 {
		fail("usage: client_go PD_ADDRESS v1|v2, or client_go PD_ADDRESS txn [KEYSPACE]")
	}
	// The client's warnings about retries belong to standard error, not to the answers.
	logger, properties, err := log.InitLogger(&log.Config{Level: "error"}, zap.WithCaller(false))
	if err != nil {
		fail(err.Error())
	}
	log.ReplaceGlobals(logger, properties)

	if os.Args[2] == "txn" {
		client, err := openTxn(os.Args[1], strings.Join(os.Args[3:], ""))
		if err != nil {
			fail(err.Error())
		}
		if err := serveTxn(client); err != nil {
			fail(err.Error())
		}
		return
	}
	version := kvrpcpb.APIVersion_V1
	if os.Args[2] == "v2" {
		version = kvrpcpb.APIVersion_V2
	}
	client, err := rawkv.NewClientWithOpts(context.Background(), []string{os.Args[1]}, rawkv.WithAPIVersion(version))
	if err != nil {
		fail(err.Error())
	}
	if err := serve(client); err != nil {
		fail(err.Error())
	}
	if err := client.Close(); err != nil {
		fail(err.Error())
	}
}

func fail(reason string) {
	fmt.Fprintln(os.Stderr, reason)
	os.Exit(1)
}

// serve answers requests until the input ends; it returns what makes going on impossible.
func serve(client *rawkv.Client) error {
	requests := json.NewDecoder(bufio.NewReaderSize(os.Stdin, 1<<20))
	output := bufio.NewWriterSize(os.Stdout, 1<<20)
	answers := json.NewEncoder(output)
	for requests.More() {
		var asked request
		if err := requests.Decode(&asked); err != nil {
			return err
		}
		given, err := perform(client, &asked)
		if err != nil {
			given = answer{"error": err.Error()}
		}
		if err := answers.Encode(given); err != nil {
			return err
		}
		if err := output.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// perform runs one operation of the client. Compare-and-swap takes the atomic mode, all others must not have it.
func perform(client *rawkv.Client, asked *request) (answer, error) {
	ctx := context.Background()
	client.SetAtomicForCAS(asked.Op == "cas")
	switch asked.Op {
	case "put":
		return answer{}, client.PutWithTTL(ctx, asked.Key, asked.Value, asked.TTL)
	case "batch_put":
		return answer{}, client.BatchPutWithTTL(ctx, asked.Keys, asked.Values, asked.TTLs)
	case "get":
		value, err := client.Get(ctx, asked.Key)
		return answer{"value": value}, err
	case "batch_get":
		values, err := client.BatchGet(ctx, asked.Keys)
		return answer{"values": values}, err
	case "ttl":
		ttl, err := client.GetKeyTTL(ctx, asked.Key)
		return answer{"ttl": ttl}, err
	case "delete":
		return answer{}, client.Delete(ctx, asked.Key)
	case "batch_delete":
		return answer{}, client.BatchDelete(ctx, asked.Keys)
	case "delete_range":
		return answer{}, client.DeleteRange(ctx, asked.Start, asked.End)
	case "scan", "reverse_scan":
		return scan(ctx, client, asked)
	case "scan_loop":
		return scanLoop(ctx, client, asked)
	case "cas":
		previous, swapped, err := client.CompareAndSwap(ctx, asked.Key, asked.Previous, asked.Value)
		return answer{"previous": previous, "swapped": swapped}, err
	case "checksum":
		sums, err := client.Checksum(ctx, asked.Start, asked.End)
		return answer{"crc64xor": sums.Crc64Xor, "total_kvs": sums.TotalKvs, "total_bytes": sums.TotalBytes}, err
	default:
		return nil, fmt.Errorf("no such operation: %q", asked.Op)
	}
}

func scan(ctx context.Context, client *rawkv.Client, asked *request) (answer, error) {
	var options []rawkv.RawOption
	if asked.KeysOnly {
		options = append(options, rawkv.ScanKeyOnly())
	}
	method := client.Scan
	if asked.Op == "reverse_scan" {
		method = client.ReverseScan
	}
	keys, values, err := method(ctx, asked.Start, asked.End, asked.Limit, options...)
	return answer{"keys": keys, "values": values}, err
}

// scanLoop reads a whole range page by page, as a program that copies data does, and says what that took this process.
func scanLoop(ctx context.Context, client *rawkv.Client, asked *request) (answer, error) {
	began, start := time.Now(), asked.Start
	before, err := cpuSeconds()
	if err != nil {
		return nil, err
	}
	rows, size := 0, 0
	for {
		keys, values, err := client.Scan(ctx, start, asked.End, asked.Limit)
		if err != nil {
			return nil, err
		}
		for i := range keys {
			size += len(keys[i]) + len(values[i])
		}
		rows += len(keys)
		if len(keys) < asked.Limit {
			break
		}
		start = append(append([]byte{}, keys[len(keys)-1]...), 0)
	}
	after, err := cpuSeconds()
	return answer{"rows": rows, "bytes": size, "seconds": time.Since(began).Seconds(), "cpu_seconds": after - before}, err
}

// cpuSeconds is the processor time that all threads have taken so far.
func cpuSeconds() (float64, error) {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0, err
	}
	return (time.Duration(usage.Utime.Nano()) + time.Duration(usage.Stime.Nano())).Seconds(), nil
}
