{{/* Names, labels, images. Every object is named <fullname>-<component>, so two releases share a namespace. */}}

{{- define "lorafleet.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{/* Labels for selectors: never changed after the install. (dict "root" $ "component" "router" "pool" "") */}}
{{- define "lorafleet.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default "lorafleet" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
lorafleet.io/pool: {{ . | quote }}
{{- end }}
{{- end }}

{{/* `more`: labels from values for this object. kustomize, and so Flux, refuses a duplicate key. */}}
{{- define "lorafleet.labels" -}}
{{ include "lorafleet.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{ toYaml (merge (dict) (.more | default dict) .root.Values.commonLabels (dict "app.kubernetes.io/part-of" "lorafleet")) }}
{{- end }}

{{/* Labels of pods: none that changes with the chart's version, or every upgrade would restart every engine. */}}
{{- define "lorafleet.podLabels" -}}
{{ include "lorafleet.selector" . }}
{{- with merge (dict) (.more | default dict) .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* (dict "root" $ "image" .Values.image): registry/repository:tag, or @digest if given. Without a registry that of the
umbrella's global.imageRegistry. */}}
{{- define "lorafleet.image" -}}
{{- $tag := .image.tag | default .root.Chart.AppVersion -}}
{{- $registry := .image.registry | default .root.Values.global.imageRegistry | default "" | trimSuffix "/" -}}
{{- $name := ternary .image.repository (printf "%s/%s" $registry .image.repository) (empty $registry) -}}
{{- if .image.digest -}}{{ $name }}@{{ .image.digest }}{{- else -}}{{ $name }}:{{ $tag }}{{- end -}}
{{- end }}

{{/* An address as part of a URL: in brackets if it is IPv6. */}}
{{- define "lorafleet.podHost" -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" .Values.ipv6 -}}
{{- end }}

{{/* The address that a server listens on to be reachable from other pods. */}}
{{- define "lorafleet.anyHost" -}}
{{- ternary "::" "0.0.0.0" .Values.ipv6 | quote -}}
{{- end }}

{{/* What router, orchestrator and agents speak. */}}
{{- define "lorafleet.scheme" -}}
{{- ternary "https" "http" .Values.tls.enabled -}}
{{- end }}

{{/* What the engines of a pool speak: SGLang and sgl-jax take no certificate. (dict "root" $ "engine" $pool.engine) */}}
{{- define "lorafleet.engineScheme" -}}
{{- ternary "https" "http" (and .root.Values.tls.enabled (has .engine (list "vllm" "sim"))) -}}
{{- end }}

{{- define "lorafleet.orchestratorUrl" -}}
{{ include "lorafleet.scheme" . }}://{{ include "lorafleet.fullname" . }}-orchestrator:{{ .Values.orchestrator.service.port }}
{{- end }}

{{/* EndpointSlices carry their Service's labels, so this finds the workers of every pool of this release. */}}
{{- define "lorafleet.workerSelector" -}}
{{- .Values.discovery.selector | default (printf "app.kubernetes.io/instance=%s,app.kubernetes.io/component=worker" .Release.Name) -}}
{{- end }}

{{/* NetworkPolicyPeers: the workers of this release, in its namespace and in those that it follows. */}}
{{- define "lorafleet.workerPeers" -}}
{{- $labels := include "lorafleet.selector" (dict "root" . "component" "worker") -}}
- podSelector:
    matchLabels:
      {{- $labels | nindent 6 }}
{{- range without (.Values.discovery.namespaces | uniq) .Release.Namespace }}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ . | quote }}
  podSelector:
    matchLabels:
      {{- $labels | nindent 6 }}
{{- end }}
{{- end }}

{{/* Secret with the tokens in clear, and the keys in it that are in use. */}}
{{- define "lorafleet.tokensSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-tokens" (include "lorafleet.fullname" .)) -}}
{{- end }}

{{- define "lorafleet.tokenKey" -}}
{{- if .root.Values.auth.existingSecret -}}{{ .role }}{{- else -}}{{ printf "%s.%d" .role (int .root.Values.auth.use) }}{{- end -}}
{{- end }}

{{/* The entries of auth.keys that a service gets, as a JSON list: routers all, orchestrators those that read or manage,
workers none. (dict "root" $ "service" "router") */}}
{{- define "lorafleet.givenKeys" -}}
{{- $service := .service -}}
{{- $found := list -}}
{{- range .root.Values.auth.keys -}}
{{- $managing := list "view" "tenant-admin" "operate" "export" "worker" "admin" -}}
{{- if .tenant }}{{ $managing = append $managing "register" }}{{ end -}}
{{- $manages := false -}}
{{- range .scopes }}{{ if has . $managing }}{{ $manages = true }}{{ end }}{{ end -}}
{{- if or (eq $service "router") (and (eq $service "orchestrator") $manages) -}}
{{- $found = append $found . -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* "true" where a service gets a file of keys, issuers or limits beside your own Secret. (dict "root" $ "service" "router") */}}
{{- define "lorafleet.hasGivenKeys" -}}
{{- if and .root.Values.auth.existingSecret (or .root.Values.auth.issuers .root.Values.auth.tenants (and .root.Values.auth.keys (ne .service "worker"))) -}}
true
{{- end -}}
{{- end }}

{{/* "true" where `lookup` finds anything; empty under `helm template` and where tools only render. The first two are read
with rights that an install needs anyway; a namespace that `--create-namespace` is about to make has neither. */}}
{{- define "lorafleet.seesCluster" -}}
{{- $ns := .Release.Namespace -}}
{{- if or (lookup "v1" "Secret" $ns (include "lorafleet.tokensSecret" .)) (lookup "v1" "ServiceAccount" $ns "default") (lookup "v1" "Namespace" "" "default") -}}
true
{{- end -}}
{{- end }}

{{/* A pool over the defaults, by the rule of overlays. (dict "root" $ "pool" $given) as YAML; read it with fromYaml. */}}
{{- define "lorafleet.pool" -}}
{{- $pool := omit .root.Values.poolDefaults "overlays" | deepCopy -}}
{{- include "lorafleet.patch" (dict "into" $pool "from" (omit .pool "overlays")) -}}
{{- with $pool.cache.persistent -}}
{{- $_ := set . "storageClassName" (.storageClassName | default $.root.Values.global.storageClass | default "") -}}
{{- end -}}
{{- $devices := include "lorafleet.parallelism" $pool | int -}}
{{- $named := concat (keys ($pool.resources.limits | default dict)) (keys ($pool.resources.requests | default dict)) | join " " -}}
{{- if and $devices $pool.gpuResource (has $pool.engine (list "vllm" "sglang")) (ne $pool.device "cpu") (not $pool.resources.claims) (not (contains "/" $named)) -}}
{{- $_ := set $pool "resources" (mustMerge (dict "limits" (dict $pool.gpuResource $devices)) $pool.resources) -}}
{{- end -}}
{{- toYaml $pool -}}
{{- end }}

{{/* The image of a pool's workers: image or agentImage, and what the pool says otherwise. A digest is of one image: it does
not hold for another repository or tag. (dict "root" $ "pool" .), the pool as in values */}}
{{- define "lorafleet.poolImage" -}}
{{- $engine := .pool.engine | default .root.Values.poolDefaults.engine -}}
{{- $image := deepCopy (ternary .root.Values.image .root.Values.agentImage (eq $engine "sim")) -}}
{{- range list .root.Values.poolDefaults.image (.pool.image | default dict) -}}
{{- if or .repository .tag -}}{{- $_ := set $image "digest" "" -}}{{- end -}}
{{- $image = mustMergeOverwrite $image (deepCopy .) -}}
{{- end -}}
{{- toYaml $image -}}
{{- end }}

{{- define "lorafleet.poolName" -}}
{{ include "lorafleet.fullname" .root }}-{{ .pool.name }}
{{- end }}

{{/* The ServiceAccount of a pool's pods: that of all workers, or one of the pool's own. (dict "root" $ "pool" .), the pool as
in values; without a pool that of all. */}}
{{- define "lorafleet.workerAccount" -}}
{{- $shared := .root.Values.poolDefaults.serviceAccount.name | default (printf "%s-worker" (include "lorafleet.fullname" .root)) -}}
{{- $own := dig "serviceAccount" dict (.pool | default dict) -}}
{{- if $own -}}
{{- $own.name | default (include "lorafleet.poolName" .) -}}
{{- else -}}
{{- $shared -}}
{{- end -}}
{{- end }}

{{/* The base model's name in the fleet and in requests. */}}
{{- define "lorafleet.baseModel" -}}
{{- .baseModel | default .servedModelName | default (base (.model | default "tiny-qwen")) -}}
{{- end }}

{{/* The setting scale_from_zero: JSON {pool: {base_model, start_s, workload}} of the pools that may be at zero. */}}
{{- define "lorafleet.fromZero" -}}
{{- $root := . -}}
{{- $found := dict -}}
{{- range .Values.pools -}}
{{- $pool := include "lorafleet.pool" (dict "root" $root "pool" .) | fromYaml -}}
{{- with $pool.autoscaling -}}
{{- if and .enabled (not (int .minReplicas)) -}}
{{- $workload := printf "%ss/%s" (lower $pool.kind) (include "lorafleet.poolName" (dict "root" $root "pool" $pool)) -}}
{{- $_ := set $found $pool.name (dict "base_model" (include "lorafleet.baseModel" $pool) "start_s" .fromZero.startSeconds "workload" (ternary $workload "" .fromZero.byOrchestrator)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $found -}}{{- toJson $found -}}{{- end -}}
{{- end }}

{{/* Devices that one worker of a pool needs for its parallelism, by engineArgs; 0 where it has none. */}}
{{- define "lorafleet.parallelism" -}}
{{- $count := 1 -}}
{{- $isGiven := false -}}
{{- range .engineArgs -}}
{{- if regexMatch "^--(tensor|pipeline)-parallel-size=[0-9]+$|^-(tp|pp)=[0-9]+$" . -}}
{{- $count = mul $count (regexFind "[0-9]+$" . | int) -}}
{{- $isGiven = true -}}
{{- end -}}
{{- end -}}
{{- ternary $count 0 $isGiven -}}
{{- end }}

{{/* Bytes of a quantity, as 100Gi, 1.5T or a number. */}}
{{- define "lorafleet.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $units = merge $units (dict "m" 0.001 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000 "E" 1000000000000000000) -}}
{{- /* A number of a file comes as a float, and a large one's text has an exponent. */ -}}
{{- $text := ternary (toString .) (printf "%d" (int64 .)) (kindIs "string" .) -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- mulf (float64 $number) (get $units $unit | default 1) | int64 -}}
{{- end }}

{{/* Who owns a workload's number of replicas: JSON {"by", "replicas", "asked", "isApplied", "isOurs"}, or {} without one.
(dict "root" $ "kind" "StatefulSet" "name" "fleet-lorafleet-l40s")

Whoever applies the chart owns its label; `kubectl scale` and autoscalers own `replicas` and not that. `by`: such an owner,
or "". `asked`: what values said at the last upgrade. `isApplied`: the release is applied on the server, which knows the
owner of each field; `isOurs`: and it has applied the number. {} too where no cluster is seen. */}}
{{- define "lorafleet.scaledBy" -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace .name -}}
{{- $by := "" -}}
{{- $isApplied := false -}}
{{- $isOurs := false -}}
{{- range dig "metadata" "managedFields" list $live -}}
{{- $fields := .fieldsV1 | default dict -}}
{{- $hasNumber := hasKey (dig "f:spec" dict $fields) "f:replicas" -}}
{{- if hasKey (dig "f:metadata" "f:labels" dict $fields) "f:helm.sh/chart" -}}
{{- $isApplied = or $isApplied (eq .operation "Apply") -}}
{{- $isOurs = or $isOurs (and (eq .operation "Apply") $hasNumber) -}}
{{- else if $hasNumber -}}
{{- $by = .manager -}}
{{- end -}}
{{- end -}}
{{- if $live -}}
{{- dict "by" $by "replicas" (int $live.spec.replicas) "asked" (dig "metadata" "annotations" "lorafleet.io/replicas" "" $live) "isApplied" $isApplied "isOurs" $isOurs | toJson -}}
{{- else -}}
{}
{{- end -}}
{{- end }}

{{/* All scalable workloads of the release, as JSON [{"kind", "name", "asked", "isScaled"}]. */}}
{{- define "lorafleet.workloads" -}}
{{- $fullname := include "lorafleet.fullname" . -}}
{{- $all := list (dict "kind" "Deployment" "name" (printf "%s-router" $fullname) "asked" .Values.router.replicas "isScaled" .Values.router.autoscaling.enabled) -}}
{{- if .Values.orchestrator.enabled -}}
{{- $all = append $all (dict "kind" "Deployment" "name" (printf "%s-orchestrator" $fullname) "asked" .Values.orchestrator.replicas "isScaled" false) -}}
{{- end -}}
{{- range .Values.pools -}}
{{- $pool := include "lorafleet.pool" (dict "root" $ "pool" .) | fromYaml -}}
{{- $name := include "lorafleet.poolName" (dict "root" $ "pool" .) -}}
{{- $all = append $all (dict "kind" $pool.kind "name" $name "asked" $pool.replicas "isScaled" $pool.autoscaling.enabled) -}}
{{- end -}}
{{- toJson $all -}}
{{- end }}

{{/* A workload's number of replicas in its manifest, and the annotation that the next upgrade reads: JSON {"replicas",
"asked"}, each left out where the manifest has none.
(dict "root" $ "kind" "Deployment" "name" $name "asked" 2 "isScaled" false)

A release keeps its manifests, and a rollback applies one of them without a look at the cluster. So a number that something
else sets is in none. Server-side apply leaves a field alone that the manifest no longer has, if another client owns it; a
field that only the release owned falls to the server's default, one. Helm 3 takes such a field away, whoever owns it: what
its manifests had once they have for good.
source  kubernetes.io, Server-Side Apply, Transferring ownership; helm 3.17 pkg/kube/client.go createPatch */}}
{{- define "lorafleet.scale" -}}
{{- $now := include "lorafleet.scaledBy" . | fromJson -}}
{{- $scale := dict -}}
{{- if .isScaled -}}
{{- if and $now.asked (not $now.isApplied) -}}{{- $scale = dict "replicas" (int $now.replicas) "asked" "live" -}}{{- end -}}
{{- else if or (not $now.by) (not .root.Values.keepScaled) -}}
{{- $scale = dict "replicas" (int .asked) "asked" (toString .asked) -}}
{{- else if has $now.asked (list "" "live" (toString .asked)) -}}
{{- $scale = dict "asked" (toString .asked) -}}
{{- if not $now.isApplied -}}{{- $_ := set $scale "replicas" (int $now.replicas) -}}{{- end -}}
{{- else if and $now.isApplied (ne (int $now.replicas) (int .asked)) -}}
{{- $what := printf "%s %s: values say %d replicas now, and %s has set %d" .kind .name (int .asked) $now.by (int $now.replicas) -}}
{{- fail (printf "%s; nothing is changed. Set the same, kubectl -n %s scale %s %s --replicas %d, and upgrade again; or let values count: --set keepScaled=false --force-conflicts" $what .root.Release.Namespace (lower .kind) .name (int .asked)) -}}
{{- else -}}
{{- $scale = dict "replicas" (int .asked) "asked" (toString .asked) -}}
{{- end -}}
{{- toJson $scale -}}
{{- end }}

{{/* Refuses to take a number of replicas out of a manifest while nobody else owns it: it would fall to one. */}}
{{- define "lorafleet.checkScaled" -}}
{{- $names := list -}}
{{- $fields := list -}}
{{- range include "lorafleet.workloads" . | fromJsonArray -}}
{{- $now := include "lorafleet.scaledBy" (merge (dict "root" $) .) | fromJson -}}
{{- if and .isScaled $now.isOurs (not $now.by) -}}
{{- $names = append $names (printf "%s %s (%d)" .kind .name (int $now.replicas)) -}}
{{- $fields = append $fields (dict "apiVersion" "apps/v1" "kind" .kind "metadata" (dict "name" .name) "spec" (dict "replicas" (int $now.replicas))) -}}
{{- end -}}
{{- end -}}
{{- if $names -}}
{{- $given := dict "apiVersion" "v1" "kind" "List" "items" $fields | toJson -}}
{{- fail (printf "autoscaling is on now, and the release itself has set the number of replicas of %s; left out, it would fall to one. Give it to the autoscaler, which changes no pod, and upgrade again: echo '%s' | kubectl -n %s apply --server-side --field-manager autoscaling -f -" (join " and " $names) $given .Release.Namespace) -}}
{{- end -}}
{{- end }}

{{/* Rules about two values at once, which no schema can express. */}}
{{- define "lorafleet.check" -}}
{{- include "lorafleet.checkScaled" . -}}
{{- $fullname := include "lorafleet.fullname" . -}}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $fullname) }}
{{- fail (printf "the release's name makes %q, and a Service's name begins with a letter and has no dots: give fullnameOverride" $fullname) }}
{{- end }}
{{- $accepted := list -}}
{{- range .Values.auth.accept }}{{- $accepted = append $accepted (int .) }}{{- end }}
{{- if and (not .Values.auth.existingSecret) (not (has (int .Values.auth.use) $accepted)) }}
{{- fail (printf "auth.use is %d, which auth.accept %v does not have: no service would accept that token. Add it to auth.accept first, wait until every pod has seen it (2 minutes), then use it; see docs/kubernetes.md, Rotate tokens" (int .Values.auth.use) $accepted) }}
{{- end }}
{{- if and .Values.router.autoscaling.enabled (eq .Values.router.autoscaling.type "keda") (not .Values.monitoring.prometheusUrl) }}
{{- fail "router.autoscaling.type is keda, which asks Prometheus: set monitoring.prometheusUrl, as http://prometheus-operated.monitoring:9090" }}
{{- end }}
{{- if not .Values.orchestrator.enabled }}
{{- if or .Values.pools .Values.adapters .Values.aliases .Values.policy }}{{- fail "orchestrator.enabled is false, and there are pools, adapters, aliases or a policy: no orchestrator would place adapters. Leave them out, or enable it" }}{{- end }}
{{- if not (or .Values.attach.engines .Values.discovery.selector) }}{{- fail "orchestrator.enabled is false: name the engines that the router serves in attach.engines, as http://vllm.default:8000, or their Services' labels in discovery.selector" }}{{- end }}
{{- end }}
{{- with .Values.orchestrator.lease }}
{{- if ge (add (int .renewSeconds) (int .marginSeconds)) (int64 .durationSeconds) }}{{- fail (printf "orchestrator.lease: renewSeconds %d and marginSeconds %d together must be less than durationSeconds %d: the Lease could not be renewed in time" (int .renewSeconds) (int .marginSeconds) (int .durationSeconds)) }}{{- end }}
{{- end }}
{{- if ne (gt (int .Values.attach.engineSlots) 0) (gt (len .Values.attach.engineRoots) 0) }}{{- fail "attach.engineSlots and attach.engineRoots: give both, or neither: adapters are loaded from the engines' own folders" }}{{- end }}
{{- with .Values.router.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}{{- fail (printf "router.autoscaling: minReplicas %d is more than maxReplicas %d" (int .minReplicas) (int .maxReplicas)) }}{{- end }}
{{- end }}
{{- $ids := dict -}}
{{- range .Values.adapters }}
{{- if hasKey $ids .lora_id }}{{- fail (printf "adapters: two have the lora_id %q; each needs one of its own" .lora_id) }}{{- end }}
{{- $_ := set $ids .lora_id true }}
{{- end }}
{{- if and .Values.orchestrator.traffic.existingClaim (gt (int .Values.orchestrator.replicas) 1) }}{{- fail (printf "orchestrator.traffic.existingClaim: one pod at a time may have its file, and orchestrator.replicas is %d: set it to 1, or leave the claim out (each orchestrator then has a volume of its own)" (int .Values.orchestrator.replicas)) }}{{- end }}
{{- with .Values.orchestrator.settings.traffic_max_bytes }}
{{- if and (not $.Values.orchestrator.traffic.existingClaim) (not (hasKey $.Values.orchestrator.settings "traffic")) (lt (include "lorafleet.bytes" $.Values.orchestrator.traffic.size | int64) (mul 2 (int64 .))) }}{{- fail (printf "orchestrator.traffic.size %v is less than twice settings.traffic_max_bytes %d: a node evicts a pod whose files exceed that; raise the size" $.Values.orchestrator.traffic.size (int64 .)) }}{{- end }}
{{- end }}
{{- with .Values.orchestrator.prices }}
{{- if and .list (not .list.currency) }}{{- fail "orchestrator.prices.list: currency is missing; give one, as EUR" }}{{- end }}
{{- if and .list .configMap.name }}{{- fail "orchestrator.prices: give a list, or the configMap that has one; leave one out" }}{{- end }}
{{- if and (or .list .configMap.name) (ne $.Values.orchestrator.store.type "postgresql") }}{{- fail "orchestrator.prices: usage is kept with orchestrator.store.type postgresql alone, so nothing would have a price; use that store, or leave prices out" }}{{- end }}
{{- end }}
{{- include "lorafleet.once" (dict "what" "imagePullSecrets" "names" .Values.imagePullSecrets "taken" list) -}}
{{- include "lorafleet.once" (dict "what" "networkPolicy.engines" "names" (include "lorafleet.each" (dict "items" .Values.networkPolicy.engines "field" "name") | fromJsonArray) "taken" list) -}}
{{- if and .Values.orchestrator.enabled (eq .Values.orchestrator.store.type "postgresql") }}
{{- if not .Values.orchestrator.store.postgresql.secretName }}{{- fail "orchestrator.store: type is postgresql; name in orchestrator.store.postgresql.secretName a Secret whose key has postgresql://user:password@host/database" }}{{- end }}
{{- range list "adapters" "aliases" "policy" }}
{{- if get $.Values . }}{{- fail (printf "%s: they are ConfigMaps, which an orchestrator with orchestrator.store.type postgresql does not read; write them over REST, or leave the type configmaps" .) }}{{- end }}
{{- end }}
{{- end }}
{{- range list "router" "orchestrator" }}
{{- include "lorafleet.checkPod" (dict "what" . "given" (get $.Values .)) -}}
{{- end }}
{{- range list "router" "orchestrator" "poolDefaults" "tests" }}
{{- include "lorafleet.checkOverlays" (dict "what" . "overlays" (get $.Values .).overlays) -}}
{{- end }}
{{- $seen := dict -}}
{{- range .Values.pools }}
{{- if hasKey $seen .name }}{{- fail (printf "pools: two are named %q; each needs a name of its own" .name) }}{{- end }}
{{- $_ := set $seen .name true }}
{{- $pool := include "lorafleet.pool" (dict "root" $ "pool" .) | fromYaml }}
{{- if has .name (list "router" "orchestrator" "worker" "tokens" "keys") }}{{- fail (printf "pools: the name %q is taken by the chart itself; give another" .name) }}{{- end }}
{{- if and (has $pool.engine (list "sglang" "sgl-jax")) (not $pool.image.repository) }}{{- fail (printf "pool %s: agentImage has vLLM; give pool.image.repository an image with %s and the agent" .name (ternary "SGLang" "sgl-jax" (eq $pool.engine "sglang"))) }}{{- end }}
{{- if and (eq $pool.engine "sgl-jax") (not $pool.settings.preload_loras) }}{{- fail (printf "pool %s: sgl-jax serves the adapters of its start alone: name those of adapterVolume in settings.preload_loras" .name) }}{{- end }}
{{- $name := include "lorafleet.poolName" (dict "root" $ "pool" .) }}
{{- /* Its pods' label controller-revision-hash is its name and 11 characters, and a label has 63: Kubernetes, ControllerRevisionName. */}}
{{- if and (eq $pool.kind "StatefulSet") (gt (len $name) 52) }}{{- fail (printf "pool %s: its StatefulSet would be named %s, of %d characters, and pods of one of more than 52 cannot be made: give the pool a shorter name, or fullnameOverride" .name $name (len $name)) }}{{- end }}
{{- $devices := include "lorafleet.parallelism" $pool | int }}
{{- $limited := get ($pool.resources.limits | default dict) $pool.gpuResource | toString }}
{{- if and $devices $limited (ne $limited (toString $devices)) }}{{- fail (printf "pool %s: resources.limits has %s of %s, and engineArgs ask for %d (--tensor-parallel-size times --pipeline-parallel-size): give %d, or leave it out" .name $limited $pool.gpuResource $devices $devices) }}{{- end }}
{{- if gt (int $pool.maxLoras) (int $pool.maxCpuLoras) }}{{- fail (printf "pool %s: maxCpuLoras %d must be at least maxLoras %d: what runs in a batch is held in host memory, too" .name (int $pool.maxCpuLoras) (int $pool.maxLoras)) }}{{- end }}
{{- if and $pool.autoscaling.enabled (eq $pool.autoscaling.type "keda") (not $.Values.monitoring.prometheusUrl) }}{{- fail (printf "pool %s: autoscaling.type is keda, which asks Prometheus: set monitoring.prometheusUrl, as http://prometheus-operated.monitoring:9090" .name) }}{{- end }}
{{- with $pool.autoscaling }}{{- if and .enabled (eq .type "hpa") (not (int .minReplicas)) }}{{- fail (printf "pool %s: autoscaling.minReplicas is 0, and a HorizontalPodAutoscaler scales nothing from zero: use type keda or external, or 1" $pool.name) }}{{- end }}{{- end }}
{{- with $pool.autoscaling }}{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}{{- fail (printf "pool %s: autoscaling.minReplicas %d is more than maxReplicas %d" $pool.name (int .minReplicas) (int .maxReplicas)) }}{{- end }}{{- end }}
{{- if and (eq $pool.kind "Deployment") $pool.cache.persistent.enabled }}{{- fail (printf "pool %s: a Deployment's pods share their volumes: use cache.existingClaim (ReadWriteMany), or kind StatefulSet for cache.persistent" .name) }}{{- end }}
{{- if and $pool.settings.max_disk_bytes (not $pool.cache.existingClaim) (gt (int64 $pool.settings.max_disk_bytes) (include "lorafleet.bytes" $pool.cache.size | int64)) }}{{- fail (printf "pool %s: settings.max_disk_bytes %d is more than cache.size %v: the volume would be full, and the pod evicted from an emptyDir, before anything is deleted; raise cache.size" $pool.name (int64 $pool.settings.max_disk_bytes) $pool.cache.size) }}{{- end }}
{{- with $pool.rollingUpdate }}
{{- if and (eq $pool.kind "Deployment") (regexMatch "^0+%?$" (toString .maxSurge)) (regexMatch "^0+%?$" (toString .maxUnavailable)) }}{{- fail (printf "pool %s: rollingUpdate: maxSurge and maxUnavailable are both 0, so no pod could be replaced, and Kubernetes refuses that: without a spare GPU set maxUnavailable: 1" $pool.name) }}{{- end }}
{{- end }}
{{- if and $pool.cache.existingClaim $pool.cache.persistent.enabled }}{{- fail (printf "pool %s: cache.existingClaim and cache.persistent.enabled: one volume; leave one out" .name) }}{{- end }}
{{- if and $pool.demoModel $pool.modelVolume }}{{- fail (printf "pool %s: demoModel makes the model in a volume of its own; leave modelVolume out" .name) }}{{- end }}
{{- include "lorafleet.checkOverlays" (dict "what" (printf "pools.%s" .name) "overlays" .overlays) -}}
{{- include "lorafleet.checkWorker" (dict "root" $ "pool" $pool "name" $name) -}}
{{- if and (not $pool.demoModel) (not $pool.model) }}{{- fail (printf "pool %s: model is missing: a hub name (Qwen/Qwen2.5-7B-Instruct), or a folder below /models on modelVolume; or demoModel: true for a tiny one that is made" .name) }}{{- end }}
{{- end }}
{{- end }}
